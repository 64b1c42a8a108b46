"""Every command of the README runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launch import run

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
# Run elsewhere: quickstart by test_scripts.py, scripts/test is this very run; no container engine is at hand in tests.
ELSEWHERE = ("scripts/quickstart", "scripts/test", "docker ")


@pytest.mark.timeout(900)
def test_commands(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    here = [command for command in COMMANDS if not command.startswith(ELSEWHERE)]
    assert len(here) >= 8
    for command in here:
        done = run(["bash", "-c", f"cd {tmp_path} && {command}"], timeout=300)
        assert done.code == 0, f"{command}\n{done.output}"
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_the_drop_in_example(tmp_path: Path) -> None:
    """The block as it stands, in a script with what every Horovod script has before and after it."""
    example = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "compressors" in block)
    script = tmp_path / "script.py"
    script.write_text(
        "import horovod.torch as hvd, torch\n"
        "hvd.init()\n"
        "model = torch.nn.Linear(3, 2)\n"
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"{example}\n"
        "with optimizer.no_sync():\n"
        "    model(torch.full((4, 3), float(hvd.rank()))).sum().backward()\n"
        "model(torch.ones(4, 3)).sum().backward()\n"
        "optimizer.step()\n"
        "weights = hvd.allgather(model.weight.detach().flatten()[None], name='weights')\n"
        "assert torch.equal(weights[0], weights[1]), weights\n"
        "expected = 4 * (0 + 1 + 2) / 2\n"
        "torch.testing.assert_close(model.weight.grad, torch.full((2, 3), expected), rtol=1e-2, atol=0)\n",
        encoding="utf-8",
    )
    done = run(["python", str(script)], launcher="mpirun", ranks=2)
    assert done.code == 0, done.output


def test_layout_named_in_the_readme_exists() -> None:
    for path in re.findall(r"`((?:hvd_novel|scripts|examples)/[\w./-]*)`", README):
        assert (ROOT / path).exists(), path
