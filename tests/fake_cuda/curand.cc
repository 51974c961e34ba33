// libcurand.so.10: ONNX Runtime's provider is linked with it, and calls nothing of it.
