"""SGLang's own lines, as others recorded them: a start is followed to the end, and KT-Kernel's layers one by one."""

from __future__ import annotations

from pathlib import Path

from kimisession.node.phases import Mark, log_reader

LOGS = Path(__file__).parents[1] / "fixtures/logs"


def marks(name: str) -> list[Mark]:
    """What the reader makes of a recorded log."""
    reader = log_reader("sglang")
    lines = (LOGS / name).read_text(encoding="utf-8").splitlines()
    return [mark for line in lines if (mark := reader.read(line)) is not None]


def test_a_recorded_start_of_sglang_is_followed_from_load_to_serve() -> None:
    found = marks("sglang-2026-05.log")
    assert list(dict.fromkeys(mark.phase for mark in found)) == ["load", "memory", "serve"]
    facts = {name: value for mark in found for name, value in mark.facts.items()}
    assert facts["weights_gib"] == "15.76"
    assert facts["kv_tokens"] == "20480"
    assert facts["max_model_len"] == "131072"
    assert Mark("load", done=1, total=4, unit="shards") in found


def test_the_last_layer_that_kt_kernel_loaded_is_known() -> None:
    found = marks("sglang-kt-2026.log")
    assert {mark.phase for mark in found} == {"load"}
    assert [mark.facts["layer"] for mark in found if "layer" in mark.facts] == ["37", "37", "59", "60"]


def test_the_graph_lines_of_kt_kernels_fork_are_read_as_well() -> None:
    """Worded as in sglang_kt 0.7.2's model_runner.py."""
    reader = log_reader("sglang")
    begin = reader.read(
        "[2026-06-18 15:00:00 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=9.90 GB"
    )
    end = reader.read(
        "[2026-06-18 15:00:09 TP0] Capture cuda graph end. Time elapsed: 9.10 s. mem usage=0.80 GB. avail mem=9.10 GB."
    )
    assert begin == Mark("graphs")
    assert end == Mark("graphs", facts={"graphs_s": "9.10", "graphs_gib": "0.80"})
