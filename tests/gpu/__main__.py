"""Run the checks without pytest: `python -m tests.gpu [--device cuda] [--json FILE] [NAME ...]`.

Each result is printed and written at once. The checks share a process until one crashes it, breaks its CUDA
context or exceeds its time; a new process then runs the rest.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORKER = ("-m", "tests.gpu")
START_UP = 60.0  # seconds for a process to import torch and find its device


def work(names: Sequence[str], device_name: str, *, small: bool) -> int:
    """Run checks in this process; print one line of JSON for each."""
    import torch

    from tests.gpu.check import Run, Skip
    from tests.gpu.checks import CHECKS

    device = torch.device(device_name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    failed = 0
    for check in CHECKS:
        if check.name not in names:
            continue
        began = time.perf_counter()
        result: dict[str, Any] = {"check": check.name, "outcome": "passed"}
        try:
            result["figures"] = check.function(Run(device, small))
        except Skip as reason:
            result |= {"outcome": "skipped", "reason": str(reason)}
        except Exception as error:  # noqa: BLE001  (every check has a result)
            failed += 1
            result |= {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"[:2000]}
            result["traceback"] = traceback.format_exc()[-3000:]
        result["seconds"] = round(time.perf_counter() - began, 2)
        print("RESULT " + json.dumps(result, default=str), flush=True)
        if "CUDA error" in result.get("reason", ""):
            return 1  # every later call in this process would fail too
    return 1 if failed else 0


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def collect(
    names: list[str], arguments: list[str], limits: dict[str, float], until: float
) -> list[dict[str, Any]]:
    """Return the results of one process; if it ended early, the last one gives the reason."""
    command = [sys.executable, *WORKER, "--here", *names, *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    results: list[dict[str, Any]] = []
    tail: list[str] = []
    allowed = START_UP
    try:
        while len(results) < len(names):
            limit = allowed + limits[names[len(results)]]
            patience = min(limit, until - time.monotonic())
            try:
                line = lines.get(timeout=max(patience, 0.1))
            except queue.Empty:
                ended = f"stopped after {patience:.0f} s"
                results.append({"check": names[len(results)], "outcome": "failed", "reason": ended})
                break
            if line is None:
                broken = bool(results) and "CUDA error" in results[-1].get("reason", "")
                if not broken:  # the check before broke the context
                    reason = f"the process ended with {process.wait()}: " + "".join(tail[-15:])
                    results.append({"check": names[len(results)], "outcome": "failed", "reason": reason})
                break
            if line.startswith("RESULT "):
                allowed = 0.0
                results.append(json.loads(line.removeprefix("RESULT ")))
                _print(results[-1])
            else:
                tail = [*tail[-30:], line]
    finally:
        process.kill()
        process.wait()
        reader.join(5)
        if process.stdout is not None and not reader.is_alive():
            process.stdout.close()
    return results


def _print(result: dict[str, Any]) -> None:
    detail = result.get("reason") or json.dumps(result.get("figures", {}), default=str)
    print(
        f"{result['outcome']:8}{result['check']:24}{result.get('seconds', 0):7.1f} s  {detail[:400]}",
        flush=True,
    )


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="checks to run (default: all)")
    parser.add_argument("--device", default="cuda", help="device under test (default: cuda)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a dry run on a CPU")
    parser.add_argument("--seconds", type=float, default=460, help="time for everything (default: 460)")
    parser.add_argument("--json", type=Path, help="file for the results, rewritten after each check")
    parser.add_argument("--here", action="store_true", help="run in this process, without a supervisor")
    options = parser.parse_args()
    from tests.gpu.checks import CHECKS

    limits = {check.name: check.seconds for check in CHECKS}
    unknown = [name for name in options.names if name not in limits]
    if unknown:
        parser.error(f"no check is called {unknown[0]!r}; known: {', '.join(limits)}")
    names = [name for name in limits if name in options.names or not options.names]
    if options.here:
        return work(names, options.device, small=options.small)
    import torch

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device is available; --device cpu --small is the dry run", file=sys.stderr)
        return 2
    until = time.monotonic() + options.seconds
    arguments = ["--device", options.device, *(["--small"] if options.small else [])]
    results: list[dict[str, Any]] = []
    while len(results) < len(names):
        if time.monotonic() > until:
            results += [
                {"check": n, "outcome": "not run", "reason": "no time left"} for n in names[len(results) :]
            ]
            break
        found = collect(names[len(results) :], arguments, limits, until)
        for result in found:
            if "seconds" not in result:
                _print(result)
        results += found
        if options.json:
            options.json.write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")
    counts = {o: sum(r["outcome"] == o for r in results) for o in ("passed", "failed", "skipped", "not run")}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
