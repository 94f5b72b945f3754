"""``agentrl audit``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.errors import AuditError, MissingError, ModelError, UnknownNameError, UserError
from agentrl.obs.console import make_console
from agentrl.obs.viewer.run_files import open_run

if TYPE_CHECKING:
    from agentrl.audit.texts import Texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "samples", type=Path, metavar="SAMPLES", help="a run's folder, its rollouts/, or a file of rollouts"
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="model folder or name that sampled them; default model.path of the run"
    )


def run(arguments: argparse.Namespace) -> None:
    """Check recorded rollouts and print a table of the result.

    Raises:
        AuditError: there is a violation.
    """
    from agentrl.audit.report import example_lines, report_table
    from agentrl.audit.run import audit_files

    console = make_console()
    samples: Path = arguments.samples
    files = open_run(samples)
    texts = _texts(arguments.tokenizer, files.config.get("model"))
    with console.status("reading rollouts"):
        report = audit_files(files.steps.values(), None if isinstance(texts, str) else texts)
    if not report.rollouts and not report.violations:
        raise UserError(f"{samples} has no rollouts")
    console.print(report_table(report, texts if isinstance(texts, str) else ""))
    for line in example_lines(report):
        console.print(line, soft_wrap=True)
    for violation in report.violations:
        console.print(str(violation), style="red", soft_wrap=True)
    if report.violations:
        rollout_count = len({violation.where for violation in report.violations})
        raise AuditError(f"{len(report.violations)} violations in {rollout_count} rollouts of {samples}")


def _texts(tokenizer: str | None, model: object) -> Texts | str:
    """Return the decoder of token ids, of ``--tokenizer`` or of the run's ``model``; or the reason why there is none."""
    from agentrl.audit.texts import Texts
    from agentrl.models.load import load_tokenizer
    from agentrl.models.resolve import resolve_model

    if tokenizer is not None:
        folder = resolve_model(tokenizer, "--tokenizer", fetch=False)
        return Texts(load_tokenizer(folder, "--tokenizer", trust_remote_code=False))
    if isinstance(model, dict) and model.get("endpoint") is not None:
        return "not measured: a model at an endpoint played, whose tokens are not known"
    if not isinstance(model, dict) or model.get("path") is None:
        return "not measured: no config.yaml next to the rollouts names a model; give --tokenizer DIR"
    try:
        folder = resolve_model(str(model["path"]), fetch=False)
        return Texts(load_tokenizer(folder, trust_remote_code=model.get("trust_remote_code") is True))
    except (MissingError, ModelError, UnknownNameError) as error:
        return f"not measured: {error}; give --tokenizer DIR"
