"""Indexer: score formula, visibility, ties, candidate blocks, selection."""

import numpy as np

from reference.oracles import indexer


def test_score_formula_and_visibility():
    queries = np.array([[[1.0, 0], [0, 1.0]]] * 4)  # 4 positions, 2 heads, width 2
    keys = np.array([[2.0, -3.0], [4.0, 8.0]])
    x, proj = np.ones((4, 1)), np.array([[1.0], [-1.0]])
    score = indexer.scores(queries, keys, x, proj, ratio=2)
    assert np.isneginf(score[0]).all()  # position 0 has no finished group
    assert score[1, 0] == 2.0 / 2 and np.isneginf(score[1, 1])  # the negative product of head 1 is cut off
    np.testing.assert_array_equal(score[3], [2.0 / 2, (4.0 - 8.0) / 2])  # negative head weights survive


def test_ties_go_to_the_lowest_index_and_the_list_is_ascending():
    np.testing.assert_array_equal(indexer.select(np.array([[1.0, 3, 3, 3, 2]]), 2), [[1, 2]])
    np.testing.assert_array_equal(indexer.select(np.array([[0.0, 9, 0, 0, 8]]), 3), [[0, 1, 4]])


def test_forbidden_columns_are_never_selected():
    row = np.array([[-np.inf, -5.0, -np.inf]])
    np.testing.assert_array_equal(indexer.select(row, 3), [[1, -1, -1]])


def test_newest_block_is_kept_although_it_scores_lowest():
    score = np.array([[5.0, 5, 5, 5, 9, 9, 9, 9, 7, 7, 7, 7, 8, 8, 8, 8, 0, 0]])  # 4 full blocks, a partial fifth
    score = np.concatenate([np.full((17, 18), -np.inf), score])  # the query that sees all 18 rows is at position 17
    kept = indexer.candidate_rows(score, ratio=1, block_size=4, keep_blocks=2)[17]
    np.testing.assert_array_equal(np.flatnonzero(kept), [4, 5, 6, 7, 16, 17])


def test_blocks_that_see_nothing_are_dropped():
    score = np.full((3, 8), -np.inf)
    score[2, :3] = 1.0
    kept = indexer.candidate_rows(score, ratio=1, block_size=2, keep_blocks=4)
    np.testing.assert_array_equal(np.flatnonzero(kept[2]), [0, 1, 2, 3])
    kept = indexer.candidate_rows(np.full((1, 4), -np.inf), ratio=2, block_size=2, keep_blocks=1)
    assert not kept.any()  # nothing visible, nothing pinned


def test_selection_margin():
    rows = np.array([[4.0, 2.0, 1.0], [8.0, 8.0, -np.inf]])
    assert indexer.selection_margin(rows, 1) == 0.0
    assert indexer.selection_margin(rows, 2) == 0.25
