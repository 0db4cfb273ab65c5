"""The cost of SFT over a large JSONL file: seconds to the first batch, memory while batches are
taken, and whether a run that continues in the middle of a pass on another number of processes gets
the same batches; and seconds to open 256 MiB of rows in each format.

    python -m benchmarks.streaming [--gib 5] [--out runs/streaming] [--smoke]

The file is made first, and deleted at the end. Each part is a separate process: a first start (the
file is out of the page cache and has no index), a second start, which takes all batches, and
continuations in the middle of them by two and by four processes, which are threads that exchange
data as processes do. A batch is compared by the digest of its tokens and masks. The wait for rows
is measured in the training loop of a tiny model too, with rows read inside the step (no threads)
and ahead of it. The last line is one of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compass_jax.config import DataConfig, ModelConfig, RunConfig, SFTConfig

TOKENIZER = Path(__file__).parent.parent / "configs" / "tiny_tokenizer"
BATCH = 64
ROW_BYTES = 1024  # approximately


def make_file(path: Path, size: int) -> None:
    """Writes different rows of a question and an answer until the file has `size` bytes."""
    solution = " ".join(f"step {n}: add {n} to the sum" for n in range(ROW_BYTES // 27))
    turns = '{"messages": [{"role": "user", "content": "Sum number %d of the file?"},'
    turns += ' {"role": "assistant", "content": "%s; the sum is %d."}]}\n'
    bytes_written, number = 0, 0
    with open(path, "w") as file:
        while bytes_written < size:
            some = [turns % (n, solution, n * 7919 % 10007) for n in range(number, number + 1000)]
            bytes_written += file.write("".join(some))
            number += 1000


def memory_mib() -> float:
    """Returns the MiB that this process holds in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def crowd(count: int) -> list[Callable[[bytes], list[bytes]]]:
    """Returns the exchanges of `count` threads, one for each."""
    board: list[bytes] = [b""] * count
    barrier = threading.Barrier(count)

    def of(number: int) -> Callable[[bytes], list[bytes]]:
        def exchange(payload: bytes) -> list[bytes]:
            board[number] = payload
            barrier.wait()
            payloads = list(board)
            barrier.wait()  # all threads read before one writes again
            return payloads

        return exchange

    return [of(number) for number in range(count)]


def part(task: dict[str, Any]) -> dict[str, Any]:
    """Measures one process: seconds to the first batch, on the clock and of the processors; MiB,
    digests of batches, and a state.
    """
    began = time.perf_counter()
    from compass_jax.data.stream import Workers
    from compass_jax.data.streamed import ExampleStream, sft_records
    from compass_jax.data.tokenizer import Tokenizer

    model = ModelConfig("qwen3", 512, 16, 1, 2, 1, 8, 32)
    files = SFTConfig(files=(task["file"],), reading="record", buckets=(64, 2048))
    data = DataConfig(cache=task["cache"])
    config = RunConfig("streaming", model, data=data, sft=files, seed=1)
    imported_s = time.perf_counter() - began

    def member(number: int, exchange: Callable[[bytes], list[bytes]]) -> dict[str, Any]:
        result: dict[str, Any] = {"digests": [], "memory_mib": {}}
        tokenizer = Tokenizer.load(TOKENIZER)
        team = Workers(number, task["processes"], exchange)
        records, _ = sft_records(config.sft, config.scored, tokenizer, lambda line: None)
        stream = ExampleStream(records, config.seed, (), team, 2 * BATCH)
        if task["state"]:
            stream.restore(task["state"])
        for count in range(1, task["batches"] + 1):
            batch = stream.next_batch(BATCH)
            result.setdefault("first_batch_s", time.perf_counter() - began)
            result.setdefault("first_batch_cpu_s", time.process_time())
            keys = "".join(example.key for example in batch)
            result["digests"].append(hashlib.blake2b(keys.encode(), digest_size=8).hexdigest())
            if count in task["looked_at"]:
                result["memory_mib"][count] = round(memory_mib(), 1)
            if count == task["state_after"]:
                result["state"] = stream.state()
        return result | {"rows": len(stream), "all_s": time.perf_counter() - began}

    with ThreadPoolExecutor(task["processes"]) as pool:
        every = list(pool.map(member, range(task["processes"]), crowd(task["processes"])))
    all_same = all(one["digests"] == every[0]["digests"] for one in every)
    return {**every[0], "all_processes_same": all_same, "imported_s": imported_s}


def ask(**task: Any) -> dict[str, Any]:
    """Runs `part` in a new process and returns its result."""
    usual = {"processes": 1, "state": None, "state_after": 0, "looked_at": []}
    command = [sys.executable, "-m", "benchmarks.streaming", "--part", json.dumps(usual | task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def out_of_the_page_cache(path: Path) -> None:
    """Removes a file from the page cache, so that the next reader gets it from the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, gib: float, batches: int) -> dict[str, Any]:
    """Measures all parts over a file of `gib` GiB."""
    file, cache = folder / "rows.jsonl", folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    make_file(file, int(gib * 2**30))
    out_of_the_page_cache(file)
    where = {"file": str(file), "cache": str(cache)}
    first = ask(**where, batches=1)
    half, some = batches // 2, min(20, batches // 2)
    looked_at = sorted({min(10, batches), batches // 5, half, batches})
    full_pass = ask(**where, batches=batches, state_after=half, looked_at=looked_at)
    expected = full_pass["digests"][half : half + some]
    goes_on = {}
    for processes in (1, 2, 4):
        continuation = ask(**where, batches=some, state=full_pass["state"], processes=processes)
        matches = continuation["digests"] == expected and continuation["all_processes_same"]
        goes_on[str(processes)] = {"same_batches": matches, "batches": some}
    per_batch = (full_pass["all_s"] - full_pass["first_batch_s"]) / max(batches - 1, 1)
    result = {
        "file_gib": round(file.stat().st_size / 2**30, 3),
        "rows": full_pass["rows"],
        "index_mib": round(sum(x.stat().st_size for x in cache.glob("*.lines")) / 2**20, 1),
        "imported_s": round(first["imported_s"], 2),
        "first_start_s": round(first["first_batch_s"], 2),
        "first_start_cpu_s": round(first["first_batch_cpu_s"], 2),
        "second_start_s": round(full_pass["first_batch_s"], 2),
        "second_start_cpu_s": round(full_pass["first_batch_cpu_s"], 2),
        "memory_mib_after_batches": full_pass["memory_mib"],
        "batches": batches,
        "rows_per_batch": BATCH,
        "batch_ms": round(1000 * per_batch, 1),
        "passes_at_the_state": round(full_pass["state"]["position"] / full_pass["rows"], 6),
        "goes_on_by_processes": goes_on,
    }
    file.unlink()
    shutil.rmtree(cache)
    return result


def in_the_loop(folder: Path, steps: int) -> dict[str, Any]:
    """Returns the milliseconds of a step of a tiny model, and those it waited for its 16 rows of
    1 KiB: medians, with rows read inside the step and ahead of it.
    """
    from compass_jax.data.streamed import ExampleStream
    from compass_jax.runs.telemetry import Telemetry
    from compass_jax.training.session import RunState
    from compass_jax.training.sft import SFTTrainer

    file = folder / "loop.jsonl"
    make_file(file, 4 * 2**20)
    sft = SFTConfig(
        files=(str(file),),
        reading="record",
        buckets=(1024,),
        batch=16,
        steps=steps,
        micro_batch_tokens=16 * 1024,
    )
    data = DataConfig(tokenizer=str(TOKENIZER), cache=str(folder / "cache"))
    model = ModelConfig("qwen3", 512, 16, 1, 2, 1, 8, 32, max_positions=1024)
    run_dir = str(folder / "run")
    config = RunConfig("loop", model, data=data, sft=sft, run_dir=run_dir).validate()
    times = {}
    for name in ("inside_the_step", "ahead"):
        telemetry = Telemetry(config.directory, steps, "sft", writes=False)
        with RunState() as stop, telemetry:
            trainer = SFTTrainer(config, stop, telemetry)
            if name == "inside_the_step":
                records, _ = trainer.examples()
                trainer.stream = ExampleStream(records, config.seed)
            logged = [metrics for _, metrics in trainer.steps()][2:]
        times[name] = {
            f"{key}_ms": round(1000 * statistics.median(x[f"time/{key}_s"] for x in logged), 2)
            for key in ("data", "step")
        }
    return times


def other_formats(folder: Path, size: int) -> dict[str, Any]:
    """Measures the same rows in each format: bytes of the file and of its cache, and seconds to
    open it the first time.
    """
    import pyarrow
    from array_record.python.array_record_module import ArrayRecordWriter
    from pyarrow import parquet

    from compass_jax.data.files import FileRows

    importlib.import_module("grain")  # takes seconds, which no format should bear
    folder = folder / "formats"
    folder.mkdir(exist_ok=True)
    plain = folder / "rows.jsonl"
    make_file(plain, size)
    text = plain.read_bytes()
    for ending, codec in ((".gz", "gzip"), (".zst", "zstd")):
        with pyarrow.CompressedOutputStream(f"{plain}{ending}", codec) as out:
            out.write(text)
    lines = text.splitlines()
    table = pyarrow.Table.from_pylist([json.loads(line) for line in lines])
    parquet.write_table(table, folder / "rows.parquet")
    writer = ArrayRecordWriter(str(folder / "rows.arrayrecord"), "group_size:1")
    for line in lines:
        writer.write(line)
    writer.close()
    formats = {}
    for file in sorted(folder.glob("rows.*")):
        cache = folder / "cache"
        began, spent = time.perf_counter(), time.process_time()
        rows = FileRows(str(file), {"messages": "add it"}, (), str(cache))
        formats[file.name] = {
            "rows": len(rows),
            "open_s": round(time.perf_counter() - began, 2),
            "open_cpu_s": round(time.process_time() - spent, 2),
            "file_mib": round(file.stat().st_size / 2**20, 1),
            "kept_mib": round(sum(x.stat().st_size for x in cache.glob("*")) / 2**20, 1),
        }
        shutil.rmtree(cache, ignore_errors=True)
    shutil.rmtree(folder)
    return formats


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark, prints its JSON line and returns it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path("runs/streaming"))
    parser.add_argument("--smoke", action="store_true", help="a file of 4 MiB, few batches")
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        print(json.dumps(part(options.part)), flush=True)
        return {}
    options.out.mkdir(parents=True, exist_ok=True)
    gib, batches = (1 / 256, 10) if options.smoke else (options.gib, 500)
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    measurements = measure(options.out, gib, batches)
    command = f"python -m benchmarks.streaming --gib {gib:g}"
    machine = {"cores": os.cpu_count(), "load_1_min": round(os.getloadavg()[0], 1)}
    formats = {"formats": other_formats(options.out, 2**20 if options.smoke else 2**28)}
    formats["loop"] = in_the_loop(options.out, 4 if options.smoke else 30)
    line = {"command": command, "commit": head.stdout.strip(), **machine, **measurements, **formats}
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    main()
