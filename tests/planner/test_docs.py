"""Each Python block of the README and of docs/ runs as it stands, given the names that its text takes for granted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from transformers import LlamaConfig, LlamaForCausalLM

from planner import auto_checkpoint

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCKS = {f"{page.stem} {i}": code for page in PAGES for i, code in enumerate(BLOCK.findall(page.read_text()))}
ONE_RANK = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29571", "RANK": "0", "WORLD_SIZE": "1"}


def language_model() -> dict[str, Any]:
    """What pages of training loops call `model`, `batch`, `data` and so on."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in torch.randint(128, (16, 32))]
    loader = torch.utils.data.DataLoader(data, 4)
    batches = list(loader)
    model = LlamaForCausalLM(config).train()
    return {"model": model, "data": data, "loader": loader, "batches": batches, "batch": batches[0]}


def run(block: str, names: dict[str, Any]) -> None:
    exec(compile(BLOCKS[block], block, "exec"), names)  # noqa: S102 - our own pages


def names_for(block: str) -> dict[str, Any]:
    """What a page takes for granted; the README and docs/distributed.md are complete."""
    if block.startswith(("README", "distributed")):
        return {}
    names: dict[str, Any] = {**language_model(), "torch": torch, "auto_checkpoint": auto_checkpoint}
    names["loss_fn"] = lambda output: output.loss
    if "accelerator" in BLOCKS[block]:
        names["accelerator"] = Accelerator(cpu=True, gradient_accumulation_steps=2)
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
        run("training 0", names)
    return names


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in ONE_RANK.items():
        monkeypatch.setenv(name, value)
    names = names_for(block)
    run(block, names)
    if block == "README 0":
        shown = (ROOT / "README.md").read_text().partition(BLOCKS[block])[2]
        peak = re.compile(r"budget .* MiB: peak .* MiB instead of .* MiB")
        assert peak.findall(capsys.readouterr().out) == peak.findall(shown)[:1]
        # A busy machine leaves the check of the page out; this one runs however long a step takes.
        assert names["plan"].check(names["model"], names["x"]).line in shown
