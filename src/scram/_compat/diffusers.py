"""What is private in diffusers: its registry of attention back ends is closed (0.42).

The check: the classes and tables that are changed are there. Fallback: none is registered, and the error says that
`patch_sdpa` does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

TABLES = (
    *("register", "_backends", "_constraints", "_supported_arg_names"),
    *("_supports_context_parallel", "_active_backend"),
)
MAPS = ("_member_map_", "_value2member_map_", "_member_names_")


def dispatch_of(name: str) -> ModuleType:
    """The module of diffusers that dispatches attention; imported so that the environment may name `name` already."""
    import diffusers
    from diffusers.utils import constants

    module = "diffusers.models.attention_dispatch"
    wanted = getattr(constants, "DIFFUSERS_ATTN_BACKEND", "")
    hidden = wanted == name and module not in sys.modules
    try:
        if hidden:  # it would not be a back end yet
            constants.DIFFUSERS_ATTN_BACKEND = "native"
        from diffusers.models import attention_dispatch
    except ImportError:
        raise _unknown(diffusers.__version__) from None
    finally:
        if hidden:
            constants.DIFFUSERS_ATTN_BACKEND = wanted
    names = getattr(attention_dispatch, "AttentionBackendName", None)
    registry = getattr(attention_dispatch, "_AttentionBackendRegistry", None)
    if not all(hasattr(registry, table) for table in TABLES) or not all(hasattr(names, one) for one in MAPS):
        raise _unknown(diffusers.__version__)
    return attention_dispatch  # type: ignore[no-any-return]


def _unknown(version: str) -> RuntimeError:
    return RuntimeError(
        f"diffusers {version} keeps its attention back ends in another way than 0.42; use "
        "`with scram.patch_sdpa(grid='auto', error=...):` around the model's calls"
    )


def add_backend(name: str, function: Callable[..., Any]) -> None:
    """A back end of that name, in place of one that was added before; active where the environment names it."""
    dispatch = dispatch_of(name)
    names = dispatch.AttentionBackendName
    registry = dispatch._AttentionBackendRegistry
    member = names._value2member_map_.get(name)
    if member is None:
        member = str.__new__(names, name)
        member._name_ = name.upper()
        member._value_ = name
        member._sort_order_ = len(names._member_names_)
        names._member_map_[member._name_] = member
        names._value2member_map_[name] = member
        names._member_names_.append(member._name_)
    registry.register(member, constraints=[dispatch._check_device], supports_context_parallel=True)(function)
    from diffusers.utils import constants

    if name == constants.DIFFUSERS_ATTN_BACKEND:
        registry.set_active_backend(member)


def remove_backend(name: str) -> None:
    """No back end of that name; where it was active, torch's own is."""
    dispatch = dispatch_of(name)
    names = dispatch.AttentionBackendName
    registry = dispatch._AttentionBackendRegistry
    member = names._value2member_map_.pop(name, None)
    if member is None:
        return
    names._member_map_.pop(member._name_)
    names._member_names_.remove(member._name_)
    for table in ("_backends", "_constraints", "_supported_arg_names"):
        getattr(registry, table).pop(member, None)
    registry._supports_context_parallel.discard(name)
    if registry._active_backend == member:
        registry.set_active_backend(names.NATIVE)


def backends(name: str) -> set[str]:
    """The names of all back ends."""
    return {member.value for member in dispatch_of(name).AttentionBackendName}


def context_parallel(function: Callable[..., Any], backward: Callable[..., Any], *args: Any, config: Any) -> Any:
    """The call on the shards of several ranks, as diffusers joins them."""
    dispatch = sys.modules["diffusers.models.attention_dispatch"]
    return dispatch._templated_context_parallel_attention(
        *args, forward_op=function, backward_op=backward, _parallel_config=config
    )
