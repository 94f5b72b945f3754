"""Skills of a task: folders with a ``SKILL.md``, which the first message lists and an agent reads when it needs them."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from xml.etree import ElementTree

import yaml

from agentrl.containers.machine import Command, Machine
from agentrl.containers.task_folder import TaskFolder
from agentrl.core.errors import TaskError

SKILL = "SKILL.md"
SKILL_BYTES = 2**18
"""Largest size of a skill's file."""
_HEAD = re.compile(r"---\s*\n(.*?)\n---", re.DOTALL)
_LIST = f'cd "$1" && pwd && for file in */{SKILL}; do [ ! -f "$file" ] || printf "%s\\n" "$file"; done'


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill. Example: ``Skill("charts", "Draw charts of tables.", "/skills/charts/SKILL.md")``."""

    name: str
    description: str
    path: str
    """Path of its file in the machine."""


async def agent_instruction(folder: TaskFolder, machine: Machine) -> str:
    """Return the first message to an agent: the instruction, and the skills in ``environment.skills_dir``.

    Raises:
        TaskError: the machine has no such folder, or a skill has no name and description.
        SandboxFailure: the machine is lost.
    """
    skills = await _find_skills(folder, machine)
    return folder.instruction + (f"\n{_skills_text(skills)}\n" if skills else "")


async def _find_skills(folder: TaskFolder, machine: Machine) -> list[Skill]:
    skills_dir = folder.config.environment.skills_dir
    if skills_dir is None:
        return []
    result = await machine.run(Command(("/bin/sh", "-c", _LIST, "sh", skills_dir)))
    if result.exit_code != 0:
        raise TaskError(f"task {folder.name}: environment.skills_dir={skills_dir}: {result.output.strip()}")
    root, *names = result.output.splitlines()
    return [await _read_skill(folder, machine, posixpath.join(root, name)) for name in names]


async def _read_skill(folder: TaskFolder, machine: Machine, path: str) -> Skill:
    files = (await machine.download(path, SKILL_BYTES)).files()
    head = _HEAD.match(files.get(SKILL, b"").decode(errors="replace"))
    try:
        values = yaml.safe_load(head[1]) if head is not None else None
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict) or not {"name", "description"} <= values.keys():
        raise TaskError(f"task {folder.name}: {path} has no name and description between two lines of ---")
    return Skill(str(values["name"]), str(values["description"]), path)


def _skills_text(skills: list[Skill]) -> str:
    """Return skills in the form of the Agent Skills specification."""
    root = ElementTree.Element("available_skills")
    for skill in skills:
        element = ElementTree.SubElement(root, "skill")
        for tag, text in (("name", skill.name), ("description", skill.description), ("location", skill.path)):
            ElementTree.SubElement(element, tag).text = text
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode")
