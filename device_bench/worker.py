"""The child process: ``python -m device_bench.worker JOB RESULT``, one job and out.

JOB is a JSON file {pass, bundle, workload, ...}; RESULT receives {"value": ...} or
{"error": one line}. A process that writes no RESULT crashed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from device_bench import bandwidth, measure, memory
from device_bench.light import import_light
from device_bench.schema import build
from device_bench.workload import Workload
from edgeqkv.artifact import Artifact, read_artifact
from edgeqkv.errors import EdgeQKVError
from edgeqkv.quiet import quiet


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:3])
    memory.die_with_parent()
    job = json.loads(job_path.read_text("utf-8"))
    try:
        outcome = {"value": run(job)}
    except EdgeQKVError as e:
        outcome = {"error": " ".join(str(e).split())}
    except MemoryError:
        outcome = {"error": "out of memory"}
    except Exception as e:
        traceback.print_exc()
        first = (str(e).strip().splitlines() or ["no message"])[0][:300]
        outcome = {"error": f"{type(e).__name__}: {first}"}
    partial = result_path.with_suffix(".partial")
    partial.write_text(json.dumps(outcome, allow_nan=False), "utf-8")
    partial.rename(result_path)
    # Some SDKs crash while they are torn down; the measurement is over and safe.
    sys.stderr.flush()
    os._exit(0)


def run(job: dict[str, Any]) -> Any:
    """The JSON value of one job. The parent has checked the bundle's hashes already."""
    if job["pass"] == "bandwidth":
        return [dataclasses.asdict(b) for b in bandwidth.measure(job["threads"])]
    bundle = Path(job["bundle"])
    if job["pass"] == "baseline":
        from device_bench.baselines import write_baseline  # brings what no measurement should hold

        write_baseline(job["tool"], Path(job["model"]), bundle)
        return None
    workload: Workload = build(Workload, job["workload"], "workload")
    artifact = read_artifact(bundle, check_sha256=False)
    import_light(artifact.backend)
    if job["pass"] == "declared":
        return declared(artifact, bundle)
    if job["pass"] == "time":
        samples, engine, interpreted = measure.time_pass(artifact, bundle, workload)
        return {
            "samples": dataclasses.asdict(samples),
            "engine": engine,
            "interpreted": interpreted,
        }
    if job["pass"] == "cold":
        start = measure.cold_pass(artifact, bundle, workload)
        return None if start is None else dataclasses.asdict(start)
    memory.page_granular()
    if job["pass"] == "memory":
        found = measure.memory_pass(artifact, bundle, workload)
        return None if found is None else dataclasses.asdict(found)
    points = (
        measure.depth_pass(artifact, bundle, workload)
        if job["pass"] == "depth"
        else measure.capacity_point(artifact, bundle, workload, job["capacity"])
    )
    return [dataclasses.asdict(p) for p in points]


def declared(artifact: Artifact, bundle: Path) -> int | None:
    """Bytes per token of the artifact's own cache tensors; None without an auditor for it."""
    found = {e.name: e for e in entry_points(group="edgeqkv.auditors")}
    if artifact.backend not in found:
        return None
    with quiet():
        return int(found[artifact.backend].load()(artifact, bundle).bytes_per_token)


if __name__ == "__main__":
    main()
