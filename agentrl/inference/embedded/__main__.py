"""``python -m agentrl.inference.embedded --model DIR``: serve a model until the process is terminated."""

from __future__ import annotations

import argparse
import socket
import sys
import traceback
from pathlib import Path

from agentrl.core.atomic_files import write_atomically
from agentrl.core.child_process import LOOPBACK, exit_with_parent


def main() -> int:
    """Serve a model; return the exit status, 1 if the engine failed."""
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
    from agentrl.obs.console import make_console, print_error

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        dtype, slots = as_dtype(arguments.dtype), arguments.max_slots
        context, threads = arguments.max_context, arguments.threads
        model = Model(
            arguments.model,
            dtype,
            slots,
            context,
            threads,
            batch_invariant=arguments.batch_invariant,
            trust_remote_code=arguments.trust_remote_code,
        )
        model.keeps_released_weights = arguments.weights_cpu_backup
        tokenizer = load_tokenizer(arguments.model, trust_remote_code=arguments.trust_remote_code)
        stops = StopMatcher(tokenizer, model.vocabulary)
    except AgentrlError as error:
        print_error(make_console(stderr=True), type(error).__name__, error)
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
    """Bind the port before the model is loaded, which takes seconds in which another process could bind it.

    Connections are refused until the server listens, so no client reaches an engine that is not ready.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    if port_file is not None:
        with write_atomically(port_file) as partial:
            partial.write_text(str(listener.getsockname()[1]))
    return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agentrl.inference.embedded", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of a causal model")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=0, help="0 chooses a free port")
    parser.add_argument("--port-file", type=Path, help="file to which the port is written")
    parser.add_argument("--dtype", default="float32", help="of weights and KV cache: float32 or bfloat16")
    parser.add_argument("--max-slots", type=int, default=256, help="sequences in the KV cache")
    parser.add_argument("--max-context", type=int, default=2048, help="most tokens of a sequence")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests without sampling_seed")
    parser.add_argument("--weight-version", default="0", help="version of the weights in the folder")
    parser.add_argument(
        "--weights-cpu-backup", action="store_true", help="resumed weights are those that were released"
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="compute a token the same whatever else is computed with it"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that a tokenizer may need")
    return parser


if __name__ == "__main__":
    sys.exit(main())
