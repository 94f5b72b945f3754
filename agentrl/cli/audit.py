"""``agentrl audit``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.yaml_text import parse_yaml
from agentrl.core.errors import AuditError, MissingError, ModelError, UnknownNameError
from agentrl.core.reading import reading
from agentrl.obs.console import make_console
from agentrl.obs.rollouts import sampled_with
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
    from agentrl.audit.run import audit_files
    from agentrl.audit.table import example_lines, report_table

    console = make_console()
    samples: Path = arguments.samples
    files = open_run(samples)
    texts = _texts(arguments.tokenizer, samples)
    with console.status("reading rollouts"):
        report = audit_files(files.steps.values(), None if isinstance(texts, str) else texts)
    console.print(report_table(report, texts if isinstance(texts, str) else ""))
    for line in example_lines(report):
        console.print(line, soft_wrap=True)
    for violation in report.violations:
        console.print(str(violation), style="red", soft_wrap=True)
    if report.violations:
        rollout_count = len({violation.where for violation in report.violations})
        raise AuditError(f"{len(report.violations)} violations in {rollout_count} rollouts of {samples}")


def _texts(tokenizer: str | None, samples: Path) -> Texts | str:
    """Return the decoder of token ids, of ``--tokenizer`` or of the run's ``model.path``; or the reason why there is none."""
    from agentrl.audit.texts import Texts
    from agentrl.models.load import load_tokenizer
    from agentrl.models.resolve import resolve_model

    if tokenizer is not None:
        return Texts(load_tokenizer(resolve_model(tokenizer, "--tokenizer", fetch=False), "--tokenizer"))
    model = _model_section(samples)
    if model.get("path") is None:
        return "not measured: no config.yaml next to the rollouts names a model; give --tokenizer DIR"
    try:
        folder = resolve_model(str(model["path"]), fetch=False)
        return Texts(load_tokenizer(folder, trust_remote_code=model.get("trust_remote_code") is True))
    except (MissingError, ModelError, UnknownNameError) as error:
        return f"not measured: {error}; give --tokenizer DIR"


def _model_section(samples: Path) -> dict[str, object]:
    """Return the section ``model`` of the run's configuration, or an empty one."""
    folders = (samples, samples.absolute().parent, samples.absolute().parent.parent)
    for config in (sampled_with(samples), *(folder / "config.yaml" for folder in folders)):
        if config.is_file():
            with reading(config, "configuration of a run"):
                tree = parse_yaml(config.read_text(encoding="utf-8"), str(config))
            model = tree.get("model") if isinstance(tree, dict) else None
            return model if isinstance(model, dict) else {}
    return {}
