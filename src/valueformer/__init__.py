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
    from valueformer.diagnostics import Diagnosis, diagnose
    from valueformer.errors import InputError, MissingExtraError
    from valueformer.estimator import DivergenceWarning, ValueFormer, load_model
    from valueformer.evaluation import evaluate
    from valueformer.feature_prompt import FeaturePrompt
    from valueformer.heads import Head
    from valueformer.inspection import DataReport
    from valueformer.metrics import HeldOut
    from valueformer.pretraining.config import PretrainConfig
    from valueformer.pretraining.run import load_transformer, pretrain
    from valueformer.prompt import Prompt
    from valueformer.results import Evaluation
    from valueformer.solvers import Solution, StepSchedule, solve
    from valueformer.sources import load
    from valueformer.support import QueryCheck
    from valueformer.transformer import Transformer, TransformerOutput
    from valueformer.transitions import Returns, Transitions, concatenate
    from valueformer.trust import Verdict
    from valueformer.writers import export

# Where each public name lives. Modules are imported when first asked for: reading a log takes no torch.
_HOMES = {
    "collect": "collection",
    "construct": "construction",
    "Diagnosis": "diagnostics",
    "diagnose": "diagnostics",
    "InputError": "errors",
    "MissingExtraError": "errors",
    "DivergenceWarning": "estimator",
    "ValueFormer": "estimator",
    "load_model": "estimator",
    "evaluate": "evaluation",
    "export": "writers",
    "Head": "heads",
    "DataReport": "inspection",
    "HeldOut": "metrics",
    "FeaturePrompt": "feature_prompt",
    "PretrainConfig": "pretraining.config",
    "load_transformer": "pretraining.run",
    "pretrain": "pretraining.run",
    "StepSchedule": "solvers",
    "Prompt": "prompt",
    "Evaluation": "results",
    "Solution": "solvers",
    "solve": "solvers",
    "load": "sources",
    "QueryCheck": "support",
    "Transformer": "transformer",
    "TransformerOutput": "transformer",
    "Returns": "transitions",
    "Transitions": "transitions",
    "concatenate": "transitions",
    "Verdict": "trust",
}

__all__ = [
    "DataReport",
    "Diagnosis",
    "DivergenceWarning",
    "Evaluation",
    "FeaturePrompt",
    "Head",
    "HeldOut",
    "InputError",
    "MissingExtraError",
    "PretrainConfig",
    "Prompt",
    "QueryCheck",
    "Returns",
    "Solution",
    "StepSchedule",
    "Transformer",
    "TransformerOutput",
    "Transitions",
    "ValueFormer",
    "Verdict",
    "__version__",
    "collect",
    "concatenate",
    "construct",
    "diagnose",
    "evaluate",
    "export",
    "kernels",
    "load",
    "load_model",
    "load_transformer",
    "pretrain",
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
