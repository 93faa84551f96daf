"""Vision: rotation by row and column, and every index of the aligner's cells."""

import numpy as np

from reference.oracles import vision


def test_rotation_pairs_halves_by_row_then_column():
    head = np.zeros(8)
    head[0], head[2] = 1.0, 1.0  # first frequency of the row part, first frequency of the column part
    result = vision.rotate_halves(head, 2, 3, 10000.0)
    expected = np.zeros(8)
    expected[[0, 4]], expected[[2, 6]] = [np.cos(2), np.sin(2)], [np.cos(3), np.sin(3)]
    np.testing.assert_allclose(result, expected, atol=1e-15)


def test_cells_are_channel_major_and_zero_padded():
    rows, columns, width = 4, 5, 2  # 2 x 2 cells, the right and lower ones partial
    patch = np.arange(rows * columns).reshape(rows, columns)
    features = np.stack([patch.reshape(-1) + 1.0, -patch.reshape(-1) - 1.0], axis=1)
    cells = vision.merge_cells(features, rows, columns, 3)
    assert cells.shape == (4, width * 9)
    np.testing.assert_array_equal(cells[0, :9], patch[:3, :3].reshape(-1) + 1)
    np.testing.assert_array_equal(cells[0, 9:], -patch[:3, :3].reshape(-1) - 1)
    lower_right = np.zeros((3, 3))
    lower_right[:1, :2] = patch[3:, 3:] + 1
    np.testing.assert_array_equal(cells[3, :9], lower_right.reshape(-1))
