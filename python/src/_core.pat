# What nanobind's stubgen leaves out of _core.pyi.
_core.__suffix__:
    __version__: str
