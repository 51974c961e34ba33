"""One folder with all that a C application needs: the library, an interpreter, ONNX Runtime and our kernels."""
