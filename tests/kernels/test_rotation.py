"""The compiled rotation against its NumPy twin, for both layouts, whole and partial widths (B1, B2)."""

import numpy as np
import pytest

from ropewalk.kernels.rotation import rotate_rows
from ropewalk.model.rope import cos_sin, plain_frequencies, rotate


@pytest.mark.parametrize("layout", ["neighbours", "halves"])
@pytest.mark.parametrize(("width", "head_dim"), [(2, 16), (32, 64), (64, 64), (96, 128)])
def test_the_kernel_is_its_twin(layout, width, head_dim):
    x = np.random.default_rng(1).standard_normal((7, head_dim)).astype(np.float32)
    before = x.copy()
    cos, sin = cos_sin(plain_frequencies(1e4, width), [0, 1, 5, 100, 4097, 70_000, 131_071])
    ours = rotate_rows(x, cos, sin, layout == "neighbours")
    np.testing.assert_allclose(ours, rotate(x, cos, sin, layout), rtol=0, atol=5e-7)
    assert ours[0].tobytes() == x[0].tobytes()
    assert ours[:, width:].tobytes() == x[:, width:].tobytes()
    assert (x == before).all()


def test_values_b1():
    one = np.float32([[1, 2, 3, 4]])
    cos, sin = cos_sin(plain_frequencies(1e4, 4), [1])
    np.testing.assert_allclose(
        rotate_rows(one, cos, sin, True)[0], [-1.142640, 1.922076, 2.959851, 4.029800], atol=1e-6
    )
    np.testing.assert_allclose(
        rotate_rows(one, cos, sin, False)[0], [-1.984111, 1.959901, 2.462378, 4.019800], atol=1e-6
    )


def test_angles_of_another_shape_or_type_are_refused():
    x, cos = np.zeros((2, 8), np.float32), np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match="must be float32"):
        rotate_rows(x, cos, cos, True)
    with pytest.raises(ValueError, match="must be float32"):
        rotate_rows(x, cos[:2].astype(np.float64), cos[:2], True)
