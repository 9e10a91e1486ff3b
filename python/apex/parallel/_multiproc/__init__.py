"""The parts of ``python -m apex.parallel.multiproc``."""
