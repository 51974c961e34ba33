"""`outrider exactness`: whether the same requests give the same tokens, whatever happens around them."""
