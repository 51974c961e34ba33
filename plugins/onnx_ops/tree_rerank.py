"""TreeRerank in standard ops."""

# The tree needs TopK's order: the lower index first among equals. The chosen candidates, sorted by index, are the tree:
# ancestors first. `candidate` ascends, so a parent's node number is the count of chosen indices at or below the
# parent's index; for -1, the root, that count is 0.
TREE_RERANK = """
<opset_import: ["" : 24], domain: "outrider">
TreeRerank <nodes> (candidate_token, candidate_score, candidate_parent, candidate_depth)
    => (candidate, token, parent, depth, score)
{
    one = Constant <value_int: int = 1> ()
    one_1 = Constant <value_ints: ints = [1]> ()
    last_1 = Constant <value_ints: ints = [-1]> ()
    nodes = Constant <value_int: int = @nodes> ()
    drafted = Sub (nodes, one)
    drafted_1 = Reshape (drafted, one_1)

    best_score, best = TopK (candidate_score, drafted_1)
    candidate, order = TopK <largest: int = 0> (best, drafted_1)
    token = GatherElements <axis: int = 1> (candidate_token, candidate)
    score = GatherElements <axis: int = 1> (candidate_score, candidate)
    depth = Gather (candidate_depth, candidate)
    chosen_parent = GatherElements <axis: int = 1> (candidate_parent, candidate)
    chosen_row = Unsqueeze (candidate, one_1)
    parent_column = Unsqueeze (chosen_parent, last_1)
    at_or_below = LessOrEqual (chosen_row, parent_column)
    counted = Cast <to: int = 7> (at_or_below)
    parent = ReduceSum <keepdims: int = 0> (counted, last_1)
}
"""
