"""`weft serve`: a small server around a Hugging Face model that weft keeps fresh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.output import err
from weft.errors import ConfigError


def serve_command(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    controller: Annotated[str, typer.Option(help="Address of the controller.", envvar="WEFT_CONTROLLER")],
    rank: Annotated[int, typer.Option(min=0, help="Rank of this engine among all engine ranks.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8000,
    dtype: Annotated[str, typer.Option(help="Precision of the weights: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Device: cpu or cuda:N.")] = "cpu",
    keys: Annotated[str, typer.Option(help="Folder with controller.pub and the engine's own key.")] = "",
    key: Annotated[str, typer.Option(help="Name of the engine's key.")] = "engine",
) -> None:
    """Answer requests with a model whose weights come from trainers. Ctrl-C stops it."""
    try:
        import torch  # noqa: PLC0415
        import uvicorn  # noqa: PLC0415
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        from weft.integrations.hf_engine import EngineThread, HfEngine  # noqa: PLC0415
        from weft.integrations.hf_server import make_app  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"`weft serve` needs {error.name}", hint="pip install 'weft[hf]'") from error
    from weft.runtime.control.security import security_in  # noqa: PLC0415

    if not (model / "config.json").is_file():
        raise ConfigError(f"`{model}` has no config.json", hint="give the folder of a Hugging Face checkpoint")
    precision = getattr(torch, dtype, None)
    if not isinstance(precision, torch.dtype):
        raise ConfigError(f"unknown dtype `{dtype}`", hint="use float32, bfloat16 or float16")
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=precision)
    loaded.to(device)
    engine = HfEngine(loaded, controller, rank=rank, security=security_in(keys, key))
    app = make_app(EngineThread(engine))
    err.print(f"engine {rank} of {controller} answers at http://{host}:{port}")
    uvicorn.run(app, host=host, port=port, log_level="warning")
