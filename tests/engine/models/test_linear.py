from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from engine.models.linear import make_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_is_that_of_torch_in_either_dtype_on_any_cpu(
    dtype: torch.dtype, rows: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    torch.testing.assert_close(make_linear(weight, bias)(x), F.linear(x, weight, bias))
