import os

# ONNX Runtime's own packages tell their maker what they run, unless this is set before they are imported. All packages
# here import this one first. Whoever wants to tell sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
