"""From whatever a user has to the shape table that a plan needs: a list of ParamInfo, nothing allocated.

Models are built on the meta device. A name is looked up in what floors above registered (`register_models`), then in
what the entry points of the group `gradreel.models` register.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.errors import GradreelError, unknown
from traces.views import ParamInfo

if TYPE_CHECKING:
    from torch import nn

#: Bytes of one element.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
#: Config files whose family is another one under its own name.
_SAME_FAMILY = {"kimi_k2": "deepseek_v3"}
#: Entries of a config.json that describe a file of weights, not the model.
_OF_FILES = ("quantization_config", "auto_map", "transformers_version", "_name_or_path", "architectures")
_ENTRY_POINTS = "gradreel.models"

_LOOKUPS: list[tuple[Callable[[], Iterable[str]], Callable[[str], Any]]] = []
_BUILDERS: dict[str, Callable[[dict[str, Any]], Any]] = {}
_entry_points_loaded = False


@dataclass(frozen=True)
class Architecture:
    """One model as a plan sees it.

    `params` is its shape table, tied weights once. `config` holds the plain values that its family's config has, for
    what shapes alone do not say (heads, top_k); empty for a bare shape table. `buffer_bytes`: tensors that are no
    parameters. `frozen`: names of parameters that get no gradient.
    """

    name: str
    params: tuple[ParamInfo, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    buffer_bytes: int = 0
    frozen: frozenset[str] = frozenset()

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(info.numel for info in self.params)

    @property
    def main_dtype(self) -> str:
        """The dtype of most elements."""
        counts: Counter[str] = Counter()
        for info in self.params:
            counts[info.dtype] += info.numel
        return counts.most_common(1)[0][0] if counts else "float32"

    def with_dtype(self, dtype: str | None) -> Architecture:
        """The same model whose main dtype is another; what the model keeps in a wider dtype stays so."""
        main = self.main_dtype
        if dtype is None or dtype == main:
            return self
        size = ITEMSIZE[dtype]
        changed = tuple(
            replace(p, dtype=dtype) if p.dtype == main or ITEMSIZE.get(p.dtype, 0) < size else p for p in self.params
        )
        return replace(self, params=changed)


def register_models(names: Callable[[], Iterable[str]], lookup: Callable[[str], Any]) -> None:
    """Let plans resolve the names that `names()` lists; `lookup(name)` gives any source but a name."""
    _LOOKUPS.append((names, lookup))


def register_builder(model_type: str, build: Callable[[dict[str, Any]], Any]) -> None:
    """Let a config with this `model_type` be built by `build(config) -> nn.Module`, called on the meta device."""
    _BUILDERS[model_type] = build


def model_names() -> list[str]:
    """Every registered name."""
    _load_entry_points()
    return sorted({name for names, _ in _LOOKUPS for name in names()})


def shape_table(source: Any) -> list[ParamInfo]:
    """The parameters of `source`; see `architecture`."""
    return list(architecture(source).params)


def architecture(source: Any) -> Architecture:
    """Read `source`: a module (meta or real), a Hugging Face config (object, dict, path of a config.json), a Trace, a
    shape table (ParamInfo objects), an Architecture, or a registered name.

    Errors: GradreelError for an unknown name or family, a file that is no config, and an empty table.
    """
    if isinstance(source, Architecture):
        return source
    if isinstance(source, str) and not _is_file(source):
        source, name = _by_name(source), source
        return replace(architecture(source), name=name)
    if hasattr(source, "infos") and hasattr(source, "header"):
        return Architecture(_name_of_trace(source), _whole(source.infos.values()))
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
        wrong = next((item for item in source if not isinstance(item, ParamInfo)), None)
        if wrong is not None or not source:
            raise GradreelError(
                f"a shape table holds {type(wrong).__name__ if source else 'nothing'}; allowed: ParamInfo objects, at "
                "least one"
            )
        return Architecture("shape table", _whole(source))
    if hasattr(source, "named_parameters"):
        return _of_module(source)
    model = build_on_meta(source)
    described = _of_module(model)
    name = str(source) if isinstance(source, (str, Path)) else described.name
    return replace(described, name=name, config={**_plain_config(source), **described.config})


def build_on_meta(source: Any) -> nn.Module:
    """Build the model of a config, a config.json or a registered name on the meta device; a module comes back as is.

    Errors: GradreelError for a family that transformers does not know, and for a source that is no model.
    """
    if isinstance(source, str) and not _is_file(source):
        return build_on_meta(_by_name(source))
    if hasattr(source, "named_parameters"):
        return source
    import torch

    values = _plain_config(source)
    family = values.get("model_type")
    with torch.device("meta"):
        if family in _BUILDERS:
            return _BUILDERS[family](values)
        return _hugging_face(source, values)


def _hugging_face(source: Any, values: dict[str, Any]) -> nn.Module:
    try:
        import transformers
        from transformers import AutoConfig
    except ImportError:
        raise GradreelError(
            "configs of Hugging Face models need transformers; install gradreel[hf], or give a module or a shape table"
        ) from None
    config = source
    if not hasattr(source, "to_dict"):
        family = _SAME_FAMILY.get(values.get("model_type", ""), values.get("model_type"))
        if not family:
            raise GradreelError("the config names no model_type; add the family, such as 'mixtral'")
        kept = {key: value for key, value in values.items() if key not in (*_OF_FILES, "model_type")}
        try:
            config = AutoConfig.for_model(family, **kept)
        except ValueError as error:
            if "nrecognized model" in str(error):
                known = [*transformers.CONFIG_MAPPING, *_BUILDERS]
                near = difflib.get_close_matches(str(family), known, n=3)
                raise GradreelError(
                    f"unknown family {str(family)[:100]!r} (model_type); transformers {transformers.__version__} "
                    f"knows {len(known)}, the nearest being {', '.join(near) or 'none'}; or give a module or a table"
                ) from None
            raise GradreelError(f"config of family {family}: {_first_line(error)}") from None
        except Exception as error:  # transformers validates with errors of its own
            raise GradreelError(f"config of family {family}: {_first_line(error)}") from None
    dtype = getattr(config, "dtype", None)
    auto = next((a for a in _auto_classes() if type(config) in a._model_mapping), None)
    if auto is None:
        raise GradreelError(
            f"transformers has no model to build from {type(config).__name__}; give the config of a language model"
        )
    try:
        return auto.from_config(config, **({"dtype": dtype} if dtype is not None else {}))
    except Exception as error:
        raise GradreelError(f"{type(config).__name__} cannot be built: {_first_line(error)}") from None


def _auto_classes() -> list[Any]:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    return [AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText, AutoModel]


def _of_module(model: Any) -> Architecture:
    from traces.roles import describe_params, named_parameters

    parameters = named_parameters(model)
    frozen = frozenset(name for name, parameter in parameters.items() if not parameter.requires_grad)
    config = getattr(model, "config", None)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return Architecture(
        type(model).__name__,
        _whole(describe_params(model)),
        {} if config is None or isinstance(config, str) else _plain_config(config),
        buffers,
        frozen,
    )


def _whole(infos: Iterable[ParamInfo]) -> tuple[ParamInfo, ...]:
    return tuple(info for info in infos if info.tied_to is None)


def _plain_config(source: Any) -> dict[str, Any]:
    """The values of a config as a plain dict."""
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_dict"):
        return dict(source.to_dict())
    if isinstance(source, (str, Path)):
        return _read_json(Path(source))
    raise GradreelError(
        f"cannot plan for {type(source).__name__}; allowed: a module, a Hugging Face config (object, dict or path of a "
        "config.json), a trace, a list of ParamInfo, or a registered name"
    )


def _read_json(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or _first_line(error)
        raise GradreelError(f"config {str(file)!r} cannot be read: {reason}; give a config.json") from None
    if not isinstance(values, dict):
        raise GradreelError(f"config {str(file)!r} holds {type(values).__name__}; allowed: a JSON object")
    return values


def _by_name(name: str) -> Any:
    if name not in model_names():
        known = model_names()
        raise (
            unknown("model", name, known)
            if known
            else GradreelError(
                f"unknown model {name!r}: no names are registered; import ablations.models.known, or give a config"
            )
        )
    return next(lookup(name) for names, lookup in _LOOKUPS if name in names())


def _is_file(text: str) -> bool:
    return text.endswith(".json") or "/" in text or Path(text).is_dir()


def _name_of_trace(trace: Any) -> str:
    return Path(str(getattr(trace, "path", "trace"))).name


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    from importlib.metadata import entry_points

    for point in entry_points(group=_ENTRY_POINTS):
        point.load()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] or type(error).__name__
