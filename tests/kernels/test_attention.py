from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import attention

HERE = Path(__file__).parent


def test_decode_kernel_agrees_with_its_truth_in_the_interpreter() -> None:
    # In a process of its own: Triton reads TRITON_INTERPRET when a kernel is decorated.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_attention.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    result = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("has_all", [False, True], ids=["plain", "window-cap-sinks"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_decode_kernel_compiles_for_hopper_without_spilling(
    dtype: str, has_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = attention._paged_decode.arg_names
    tensors = {"query_ptr", "keys_ptr", "values_ptr", "out_ptr", "sinks_ptr"}
    constants = {"GROUP": 3, "GROUP_ROWS": 16, "DIM": 64, "DIM_COLUMNS": 64, "SIZE": 32}
    constants |= dict.fromkeys(("HAS_WINDOW", "HAS_CAP", "HAS_SINKS"), has_all)
    signature = (
        dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr") | {"scale": "fp32", "soft_cap": "fp32"}
    )
    signature |= dict.fromkeys(tensors, f"*{dtype}") | {"tables_ptr": "*i32", "lengths_ptr": "*i32"}
    # What the launcher sees in aligned tensors; without it the loads are not vectorised, and it is another kernel.
    aligned = [name for name in names if name in tensors or (name.endswith("stride") and name != "table_stride")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=attention._paged_decode, signature=signature, constexprs=constants, attrs=attributes)

    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))

    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in usage, usage  # registers that do not fit are spilled to the stack


def test_importing_transformers_leaves_triton_alone() -> None:
    # transformers looks for a package of its own named `kernels`; ours must not pass for it, nor bring Triton in.
    program = (
        "import sys, transformers, transformers.utils\n"
        "assert 'triton' not in sys.modules\n"
        "assert not transformers.utils.is_kernels_available()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=HERE.parents[1], capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stderr
