# Attributes that nanobind's stubgen leaves out of _core.pyi.
_core.__suffix__:
    __version__: str

# Dictionaries whose value types stubgen does not know.
_core.ModuleWatch.__init__:
    \from typing import Any
    def __init__(self, dictionaries: Sequence[dict[str, Any]]) -> None: ...

_core.Reducer.statistics:
    def statistics(self) -> dict[str, float]: ...
