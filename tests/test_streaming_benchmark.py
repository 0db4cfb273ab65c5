"""The benchmark of large files, run on small ones."""

import pytest

from benchmarks import streaming


def test_every_format_holds_the_same_rows_and_packed_ones_are_kept_unpacked(tmp_path):
    formats = streaming.other_formats(tmp_path, 2**20)
    assert len(formats) == 5 and {sizes["rows"] for sizes in formats.values()} == {1000}
    kept_mib = {name: sizes["kept_mib"] for name, sizes in formats.items()}
    text = formats["rows.jsonl"]["file_mib"]
    for name in ("rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet"):
        assert text <= kept_mib[name] < text + 0.2 and formats[name]["file_mib"] < text
    assert kept_mib["rows.arrayrecord"] == 0 and kept_mib["rows.jsonl"] < 0.1


@pytest.mark.slow
def test_a_run_over_a_file_goes_on_with_the_same_batches_on_other_numbers_of_processes(tmp_path):
    summary = streaming.main(["--smoke", "--out", str(tmp_path)])
    assert summary["rows"] == 4000 and summary["passes_at_the_state"] == 5 * 64 / 4000
    expected = {"same_batches": True, "batches": 5}
    assert summary["goes_on_by_processes"] == {"1": expected, "2": expected, "4": expected}
    memory = summary["memory_mib_after_batches"]
    assert list(memory) == ["2", "5", "10"] and memory["10"] < memory["2"] + 20
    assert not (tmp_path / "rows.jsonl").exists()
