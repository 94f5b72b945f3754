"""``--env tools`` through the command line: rows, a function and a tool server, and a reward, without a class."""

import json
import re
from pathlib import Path

from agentrl_tasks.math_problems.policies import WARM
from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, agentrl, metrics

from agentrl.core.types import StopReason
from agentrl.obs.rollouts import read_rollouts

TOOLS = '''
import re
from agentrl import tool


@tool(name="python", timeout_s=5)
def calculate(code: str) -> str:
    """Run Python code."""
    numbers = re.fullmatch(r"print\\((\\d+) ([*+-]) (\\d+)\\)", code)
    if numbers is None:
        raise ValueError("only products, sums and differences")
    a, b = int(numbers[1]), int(numbers[3])
    return str({"*": a * b, "+": a + b, "-": a - b}[numbers[2]])
'''


def test_a_step_is_trained_on_calls_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(TOOLS)
    factors = (1675, 12603), (36505, 55408), (205, 3112), (4507, 671)
    questions = [(f"Find the product of {a} and {b}.", a * b) for a, b in factors]
    rows = [{"prompt": text, "answer": f"so #### {product}"} for text, product in questions]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = agentrl(
        *(
            "train",
            *ONE_THREAD,
            "--env",
            "tools",
            "data.path=rows.jsonl",
            "data.convert=gsm8k",
            "data.label_key=answer",
        ),
        *("env.tools=[my_tools.py:calculate]", "reward=numeric", f"model.path={WARM}", "train.steps=1", "run.dir=run"),
        *("rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "rollout.max_turns=2", "rollout.max_tokens=1024"),
        *("sampler.max_new_tokens=128", "sampler.embedded.slots=16", "obs.progress=plain", "obs.tensorboard=false"),
        cwd=tmp_path,
        target=IN_PROCESS_LEARNER,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [step] = [row for row in metrics(tmp_path / "run") if "train/reward" in row]
    rollouts = read_rollouts(tmp_path / "run" / "rollouts" / "step_000001.jsonl")
    assert len(rollouts) == 16
    assert step["tool/python/calls"] > 0
    assert {rollout.reward for rollout in rollouts} == {0.0, 1.0}
    assert step["train/loss"] != 0
    for rollout in rollouts:
        answer = "" if rollout.stop_reason is StopReason.MAX_TURNS else rollout.turns[-1].action
        assert rollout.metadata["agent_answer"] == answer
        number = re.findall(r"\d+", answer)
        assert rollout.reward == float(number[-1:] == [rollout.label])
        [row] = rollout.rows
        assert int(row.mask.sum()) == rollout.sampled_tokens
