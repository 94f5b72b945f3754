"""``python -m agentrl.inference.embedded --model DIR``: serve a model until told to end."""

from __future__ import annotations

import argparse
import socket
import sys
import traceback
from pathlib import Path

from agentrl.core.child_process import exit_with_parent


def main() -> int:
    """Serve; the exit status is 1 where the engine failed."""
    exit_with_parent()
    arguments = _parser().parse_args()
    listener = _bind(arguments.host, arguments.port, arguments.port_file)

    import uvicorn
    from transformers.utils import logging

    from agentrl.core.errors import AgentrlError
    from agentrl.inference.embedded.app import build_app
    from agentrl.inference.embedded.model import Model
    from agentrl.inference.embedded.scheduler import Scheduler
    from agentrl.inference.embedded.stop_strings import StopMatcher
    from agentrl.models.load import as_dtype, load_tokenizer

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        dtype, slots = as_dtype(arguments.dtype), arguments.max_slots
        model = Model(arguments.model, dtype, slots, arguments.max_context, arguments.threads)
        stops = StopMatcher(load_tokenizer(arguments.model), model.vocabulary)
    except AgentrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    scheduler = Scheduler(model, stops, slots, arguments.seed, arguments.weight_version)
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        traceback.print_exception(error)
        failures.append(error)
        server.should_exit = True

    app = build_app(scheduler, fail)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    server.run(sockets=[listener])
    return 1 if failures else 0


def _bind(host: str, port: int, port_file: Path | None) -> socket.socket:
    """Take the port at once: loading a model lasts seconds, in which somebody else could take it.

    Nobody can connect until the server listens, so whoever waits for it sees no half-ready engine.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    if port_file is not None:
        draft = port_file.with_name(port_file.name + ".draft")
        draft.write_text(str(listener.getsockname()[1]))
        draft.rename(port_file)
    return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agentrl.inference.embedded", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of a causal model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="file that the port is written to")
    parser.add_argument("--dtype", default="float32", help="of weights and KV cache: float32 or bfloat16")
    parser.add_argument("--max-slots", type=int, default=256, help="sequences whose KV cache is kept")
    parser.add_argument("--max-context", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--weight-version", default="0", help="name of the weights in the folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
