"""Load a model without letting transformers fill in missing weights.

transformers initialises tensors that the files lack, or have in another shape, at random, with only a warning, and
training would continue from there. Here the loader's own report decides: in `load_whole`, when a function loads its
model, and in `misfit`, which asks the same loader before anything is started. `misfit` passes tensors without data
(torch's meta device), so that renamed, fused and tied weights and old buffers are treated as in a real load.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from rlhfless.functions.sharding import class_of, local
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import counted
from rlhfless.util.errors import first_line

Shape = tuple[int, ...]

RESTORE = "fetch the model again from where it came from"
OTHER_CONFIG = "config.json and the weights belong to different models: take both from the same place"


@dataclass(frozen=True, slots=True)
class Misfit:
    """The differences between stored weights and a model's tensors, by checkpoint names."""

    model: str
    """The model's class."""
    missing: Mapping[str, Shape]
    """The missing tensors, with the model's shapes."""
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, tuple[Shape, Shape]]
    """Tensors of another shape: (stored shape, model's shape)."""
    failure: str = ""
    """The loader's error, if it gave up without naming a tensor."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched or self.failure)

    def problems(self, field: str, holder: Callable[[Iterable[str]], str]) -> list[Problem]:
        """Return one problem per kind. `holder` returns the name of the file that holds the named tensors."""
        problems = []
        if self.missing:
            what = counted("tensor", [f"{name!r} {list(shape)}" for name, shape in sorted(self.missing.items())])
            problems.append(Problem(field, f"{holder(())} lacks {what}, which {self.model} needs", RESTORE))
        if self.mismatched:
            what = counted(
                "tensor",
                (
                    f"{name!r} as {list(actual)} instead of {list(wanted)}"
                    for name, (actual, wanted) in sorted(self.mismatched.items())
                ),
            )
            problems.append(Problem(field, f"{holder(self.mismatched)} has {what}", OTHER_CONFIG))
        if self.unexpected:
            what = counted("tensor", map(repr, sorted(self.unexpected)))
            what = f"{holder(self.unexpected)} has {what}, which {self.model} does not take"
            problems.append(Problem(field, what, OTHER_CONFIG))
        if self.failure:
            what = f"the tensors of {holder(())} cannot be converted to the ones of {self.model}: {self.failure}"
            problems.append(Problem(field, what, RESTORE))
        return problems


def load_whole(
    auto: Any,
    path: str,
    field: str,
    *,
    prepare: Callable[[Any], None] | None = None,
    offload: bool = False,
    new_head: bool = False,
    **options: Any,
) -> Any:
    """Return `auto.from_pretrained(path, **options)` if the files contain all weights, and all are finite.

    With `new_head`, only the decoder comes from the files: their other tensors are ignored, and the model's are set
    to 0. `field` is the spec's field that named the path. `prepare` is called with the model before its weights are
    read, while its tensors have no data: if it splits them over ranks, each rank reads its own parts. With
    `offload`, those parts stay in host memory. Raises InputError, and transformers' errors for an unreadable path.
    """
    try:
        nothing = contextlib.nullcontext()
        with _prepared(prepare), _in_host_memory() if offload else nothing, _quiet() if new_head else nothing:
            model, loading = auto.from_pretrained(
                path, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except (SafetensorError, pickle.UnpicklingError, EOFError) as error:
        raise _unfit(path, [Problem(field, f"a weight file cannot be read: {error}", RESTORE)]) from error
    except RuntimeError as error:
        if not _of_conversion(error):
            raise
        gave_up = Misfit("the model", {}, (), {}, first_line(error))
        raise _unfit(path, gave_up.problems(field, _checkpoint)) from error
    misfit = _misfit_of(model, loading, {})
    if new_head:
        misfit = _of_decoder(model, misfit)
    problems = misfit.problems(field, _checkpoint)
    bad = [repr(name) for name, parameter in model.named_parameters() if not is_finite(parameter)]
    if bad:
        what = f"NaN or infinite values are in {counted('tensor', bad)} (as {str(model.dtype).removeprefix('torch.')})"
        problems.append(Problem(field, what, RESTORE))
    if problems:
        raise _unfit(path, problems)
    return model


@torch.no_grad()
def _of_decoder(model: Any, misfit: Misfit) -> Misfit:
    """Restrict a misfit to the decoder and set the model's other missing parameters to 0."""
    inside = f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters():
        if name in misfit.missing and not name.startswith(inside):
            parameter.zero_()
    return dataclasses.replace(
        misfit,
        missing={name: shape for name, shape in misfit.missing.items() if name.startswith(inside)},
        unexpected=tuple(name for name in misfit.unexpected if name.startswith(inside)),
    )


@contextlib.contextmanager
def _prepared(prepare: Callable[[Any], None] | None) -> Iterator[None]:
    """Make transformers call `prepare` between building and loading a model, within the block.

    Its own option for this (`distributed_config`) creates the mesh and the groups itself and requires torchrun's
    environment.
    """
    if prepare is None:
        yield
        return
    load = PreTrainedModel._load_pretrained_model

    def load_prepared(model: Any, *arguments: Any, **options: Any) -> Any:
        prepare(model)
        return load(model, *arguments, **options)

    with _replaced(PreTrainedModel, "_load_pretrained_model", staticmethod(load_prepared)):
        yield


@contextlib.contextmanager
def _in_host_memory() -> Iterator[None]:
    """Make transformers leave the parts of split tensors where it reads them, within the block.

    By default it moves them to the mesh's device (`DTensor.from_local`), where FSDP rejects parameters that are to
    be offloaded.
    """

    def wrapped(part: torch.Tensor, like: DTensor) -> DTensor:
        return DTensor(part.contiguous(), like._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    with contextlib.ExitStack() as replaced:
        for user in (core_model_loading, modeling_utils):
            replaced.enter_context(_replaced(user, "_dtensor_from_local_like", wrapped))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: object) -> Iterator[None]:
    """Replace an attribute of a class or module within the block."""
    value = vars(owner)[name]
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, value)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether this rank's part has no NaN or infinity, without a temporary copy of the tensor."""
    values = local(tensor.detach())
    if not values.is_floating_point() or not values.numel():
        return True
    low, high = torch.aminmax(values)  # NaN wins both
    return math.isfinite(low) and math.isfinite(high)


def build_blank(auto: Any, config: Any, **options: Any) -> Any:
    """Return `auto.from_config(config, **options)` with tensors without data. Raises the model class's errors."""
    with _quiet(), torch.device("meta"):
        return auto.from_config(copy.deepcopy(config), **options)


def misfit(blank: Any, config: Any, stored: Mapping[str, Shape]) -> Misfit:
    """Return how tensors of these names and shapes fit the model `blank` of this config. Reads no file."""
    tensors = {name: torch.empty(tuple(shape), device="meta") for name, shape in stored.items()}
    try:
        with _quiet():
            model, loading = type(blank).from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=tensors,
                device_map="meta",
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except RuntimeError as error:
        if not _of_conversion(error):
            raise
        # Parts of a fused tensor are missing or have other shapes, and the loader does not say which.
        everything = set(blank.state_dict()) - set(getattr(blank, "all_tied_weights_keys", ()))
        gave_up = Misfit(type(blank).__name__, {}, (), {}, first_line(error))
        return _in_names_of_files(blank, gave_up, everything, stored)
    return _misfit_of(model, loading, stored)


def _misfit_of(model: Any, loading: Mapping[str, Any], stored: Mapping[str, Shape]) -> Misfit:
    """Convert transformers' loading report. `stored`: the tensors of the files, if known."""
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    result = Misfit(
        class_of(model).__name__,
        {name: shapes.get(name, ()) for name in loading["missing_keys"]},
        tuple(loading["unexpected_keys"]),
        {name: (tuple(has), tuple(wanted)) for name, has, wanted in loading["mismatched_keys"]},
    )
    return _in_names_of_files(model, result, {*result.missing, *result.mismatched}, stored) if result else result


def _in_names_of_files(model: Any, result: Misfit, faulty: set[str], stored: Mapping[str, Shape]) -> Misfit:
    """Translate a misfit to checkpoint names.

    A parameter may consist of several stored tensors, such as a layer's experts. `faulty` are names of the model.
    """
    if not stored:
        return result
    parameters = model.state_dict()
    model._weight_conversions = None  # the class's, not those used by this load
    try:
        parts = revert_weight_conversion(model, {name: parameters[name] for name in faulty if name in parameters})
    except Exception:  # a many-to-one conversion cannot be undone with only some of the tensors
        return result
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    missing = {name: shape for name, shape in shapes.items() if name not in stored}
    mismatched = {
        name: (tuple(stored[name]), shape)
        for name, shape in shapes.items()
        if name in stored and tuple(stored[name]) != shape
    }
    if not (missing or mismatched):
        return result
    return Misfit(result.model, missing, result.unexpected, mismatched)


def _checkpoint(_: Iterable[str]) -> str:
    """Return a generic name: the loader does not say which file a tensor came from."""
    return "the checkpoint"


def _of_conversion(error: RuntimeError) -> bool:
    """Return whether this is transformers' conversion error, and not out of memory, which has the same type.

    See transformers/utils/loading_report.py.
    """
    return "automatic conversion of the weights" in str(error)


def _unfit(path: str, problems: list[Problem]) -> InputError:
    return InputError(f"the model {path!r}", problems)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' loading report and progress bar."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)  # type: ignore[no-untyped-call]
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
