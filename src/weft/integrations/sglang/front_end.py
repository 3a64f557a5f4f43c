"""In SGLang's tokenizer manager: the version that unfinished answers and `/model_info` carry."""

from __future__ import annotations

from typing import Any


def listening(_: None, manager: Any) -> None:
    """The manager has set up its message handlers: let it also hear of versions from the scheduler."""
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput  # noqa: PLC0415
    from sglang.utils import TypeBasedDispatcher  # noqa: PLC0415

    def heard(told: Any) -> None:
        manager._update_weight_version_if_provided(told.new_version)

    manager._result_dispatcher += TypeBasedDispatcher([(UpdateWeightVersionReqInput, heard)])
