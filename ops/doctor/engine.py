"""Findings about what is installed: SGLang, torch, and what a worker needs beside them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata

from ...worker.sglang.patches import RELEASES
from .finding import Finding

LOAD_S = 120.0
NEEDED = ("transformers", "safetensors", "psutil")
OPTIONAL = {
    "zstandard": "journal",
    "pyarrow": "parquet",
    "simpleeval": "replay",
    "prometheus_client": "metrics",
    "sse-starlette": "gateway",
    "starlette": "dashboard",
    "opentelemetry-sdk": "otel",
    "rq": "ops",
    "mcp": "mcp",
    "tokenizers": "text",
    "fsspec": "remote",
}
"""Package -> the extra that brings it."""
_ASK_TORCH = """
import json, os, torch
os.environ["USE_PYTORCH_KERNEL_CACHE"] = "0"
there, unusable = torch.cuda.is_available(), None
nccl = torch.cuda.nccl.version() if there else None
try:
    if there:
        kernel = "template <typename T> T twice(T x) { return x + x; }"
        torch.cuda.jiterator._create_jit_fn(kernel)(torch.ones(1, device="cuda"))
except Exception as error:
    unusable = str(error) or repr(error)
nccl = ".".join(map(str, nccl)) if nccl else None
print(json.dumps({"cuda": torch.version.cuda, "available": there, "nccl": nccl, "unusable": unusable}))
"""
"""What torch says of itself. It compiles a kernel as it does while it runs: by NVRTC, whose libraries it loads then."""


def engine_findings(*, has_gpu: bool) -> tuple[bool, list[Finding]]:
    """Whether this is a worker's host, and the findings."""
    sglang, torch = version("sglang"), version("torch")
    if sglang is None:
        found = "SGLang is not installed: not a worker host"
        advice = "For a worker, `pip install 'rolloutmq[sglang]'`." if has_gpu else ""
        return False, [Finding("engine", "ok", found, advice), *_torch(torch, has_gpu=has_gpu), _extras()]
    missing = [name for name in NEEDED if version(name) is None]
    findings = [_sglang(sglang), *_torch(torch, has_gpu=has_gpu)]
    if missing:
        advice = "`pip install 'rolloutmq[worker]'` brings them."
        findings.append(Finding("engine", "problem", f"a worker needs {', '.join(missing)}", advice))
    return True, [*findings, _extras()]


def version(package: str) -> str | None:
    """Of an installed package, which is not loaded."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sglang(release: str) -> Finding:
    oldest, newest = (_numbers(it) for it in RELEASES.split(" to "))
    found = f"SGLang {release}, supported are {RELEASES}"
    if oldest <= _numbers(release) <= newest:
        return Finding("engine", "ok", found)
    advice = "Install a supported release: a worker refuses to start where SGLang differs in what it changes."
    return Finding("engine", "problem" if _numbers(release) < oldest else "warning", found, advice)


def _torch(release: str | None, *, has_gpu: bool) -> list[Finding]:
    if release is None:
        return []
    if not has_gpu:
        return [Finding("torch", "ok", release)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=LOAD_S, check=True
        )
        facts = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        words = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return [
            Finding(
                "torch",
                "problem",
                f"{release} cannot be loaded: {words[-1][:200] if words else ''}",
                "Install it again.",
            )
        ]
    if not facts["available"]:
        built = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
        advice = "Install a torch for a CUDA that the driver supports, and look at CUDA_VISIBLE_DEVICES."
        return [Finding("torch", "problem", f"{release}, {built}, sees no GPU", advice)]
    known = [Finding("torch", "ok", f"{release}, CUDA {facts['cuda']}"), Finding("nccl", "ok", str(facts["nccl"]))]
    return [*known, _nvrtc(facts["unusable"])]


def _nvrtc(unusable: str | None) -> Finding:
    if unusable is None:
        return Finding("nvrtc", "ok", "compiles kernels")
    told = " ".join(unusable.split())[:200]
    if "nvrtc" not in told.lower():
        return Finding("nvrtc", "warning", f"could not be tried: {told}", "Try again while the GPU has memory free.")
    advice = (
        "Put the folder that has libnvrtc on LD_LIBRARY_PATH ($CONDA_PREFIX/lib with conda), or install torch again."
    )
    return Finding("nvrtc", "problem", f"no kernel can be compiled: {told}", advice)


def _extras() -> Finding:
    there = [f"{extra} ({name} {version(name)})" for name, extra in OPTIONAL.items() if version(name)]
    missing = [extra for name, extra in OPTIONAL.items() if version(name) is None]
    found = f"optional parts: {', '.join(there) or 'none'}" + (
        f"; not installed: {', '.join(missing)}" if missing else ""
    )
    return Finding("extras", "ok", found)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])
