"""valueformer: policy evaluation by in-context learning with one frozen, non-linear transformer.

>>> import valueformer as vf
>>> data = vf.load("sample:pick-place-v3/low")
>>> model = vf.ValueFormer(gamma=0.9).fit(data)
>>> values = model.predict(data.observations)
"""

from valueformer import kernels
from valueformer.construction import construct
from valueformer.errors import InputError, MissingExtraError
from valueformer.estimator import DivergenceWarning, ValueFormer
from valueformer.evaluation import evaluate
from valueformer.inspection import DataReport
from valueformer.metrics import HeldOut
from valueformer.prompt import Prompt
from valueformer.results import Evaluation
from valueformer.solvers import Solution, solve
from valueformer.sources import load
from valueformer.transformer import Transformer, TransformerOutput
from valueformer.transitions import Returns, Transitions, concatenate
from valueformer.version import __version__

load_model = ValueFormer.load

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
    "concatenate",
    "construct",
    "evaluate",
    "kernels",
    "load",
    "load_model",
    "solve",
]
