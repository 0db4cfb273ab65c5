"""The benchmark of large files, on small ones."""

import pytest

from benchmarks import streaming


def test_every_format_holds_the_same_rows_and_packed_ones_are_kept_unpacked(tmp_path):
    found = streaming.other_formats(tmp_path, 2**20)
    assert len(found) == 5 and {one["rows"] for one in found.values()} == {1000}
    kept = {name: one["kept_mib"] for name, one in found.items()}
    text = found["rows.jsonl"]["file_mib"]
    for name in ("rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet"):
        assert text <= kept[name] < text + 0.2 and found[name]["file_mib"] < text
    assert kept["rows.arrayrecord"] == 0 and kept["rows.jsonl"] < 0.1


@pytest.mark.slow
def test_a_run_over_a_file_goes_on_with_the_same_batches_on_other_numbers_of_processes(tmp_path):
    found = streaming.main(["--smoke", "--out", str(tmp_path)])
    assert found["rows"] == 4000 and found["passes_at_the_state"] == 5 * 64 / 4000
    same = {"same_batches": True, "batches": 5}
    assert found["goes_on_by_processes"] == {"1": same, "2": same, "4": same}
    memory = found["memory_mib_after_batches"]
    assert list(memory) == ["2", "5", "10"] and memory["10"] < memory["2"] + 20
    assert not (tmp_path / "rows.jsonl").exists()
