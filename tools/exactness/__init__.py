"""`outrider exactness`: whether the same requests give the same tokens under every condition around them."""
