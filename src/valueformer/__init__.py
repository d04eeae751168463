"""valueformer: policy evaluation by in-context learning with one frozen, non-linear transformer.

>>> import valueformer as vf
>>> data = vf.load("sample:pick-place-v3/low")
>>> model = vf.ValueFormer(gamma=0.9).fit(data)
>>> values = model.predict(data.observations)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from valueformer.version import __version__

if TYPE_CHECKING:
    from valueformer import kernels
    from valueformer.collection import collect
    from valueformer.construction import construct
    from valueformer.errors import InputError, MissingExtraError
    from valueformer.estimator import DivergenceWarning, ValueFormer, load_model
    from valueformer.evaluation import evaluate
    from valueformer.inspection import DataReport
    from valueformer.metrics import HeldOut
    from valueformer.prompt import Prompt
    from valueformer.results import Evaluation
    from valueformer.solvers import Solution, solve
    from valueformer.sources import load
    from valueformer.transformer import Transformer, TransformerOutput
    from valueformer.transitions import Returns, Transitions, concatenate
    from valueformer.writers import export

# Where each public name lives. Modules are imported when first asked for: reading a log takes no torch.
_HOMES = {
    "collect": "collection",
    "construct": "construction",
    "InputError": "errors",
    "MissingExtraError": "errors",
    "DivergenceWarning": "estimator",
    "ValueFormer": "estimator",
    "load_model": "estimator",
    "evaluate": "evaluation",
    "export": "writers",
    "DataReport": "inspection",
    "HeldOut": "metrics",
    "Prompt": "prompt",
    "Evaluation": "results",
    "Solution": "solvers",
    "solve": "solvers",
    "load": "sources",
    "Transformer": "transformer",
    "TransformerOutput": "transformer",
    "Returns": "transitions",
    "Transitions": "transitions",
    "concatenate": "transitions",
}

__all__ = [
    "DataReport",
    "DivergenceWarning",
    "Evaluation",
    "HeldOut",
    "InputError",
    "MissingExtraError",
    "Prompt",
    "Returns",
    "Solution",
    "Transformer",
    "TransformerOutput",
    "Transitions",
    "ValueFormer",
    "__version__",
    "collect",
    "concatenate",
    "construct",
    "evaluate",
    "export",
    "kernels",
    "load",
    "load_model",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return import_module("valueformer.kernels")
    if name not in _HOMES:
        raise AttributeError(f"module 'valueformer' has no attribute {name!r}")
    value = getattr(import_module(f"valueformer.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
