"""WindowBias in standard ops."""

# `from_here` counts the visible keys from a key on; in int32, which every backend adds up exactly.
WINDOW_BIAS = """
<opset_import: ["" : 24], domain: "outrider">
WindowBias <window> (attn_bias) => (window_bias)
{
    keys_axis = Constant <value_int: int = 3> ()
    zero = Constant <value_float: float = 0.0> ()
    hidden = Constant <value_float: float = -3.4028234663852886e38> ()
    most_wide = Constant <value_int: int = @window> ()
    most = Cast <to: int = 6> (most_wide)
    visible = Equal (attn_bias, zero)
    counted = Cast <to: int = 6> (visible)
    from_here = CumSum <reverse: int = 1> (counted, keys_axis)
    within = LessOrEqual (from_here, most)
    kept = And (visible, within)
    window_bias = Where (kept, zero, hidden)
}
"""
