import os

# ONNX Runtime's own packages report to their maker what they run, unless this is set before they are imported. All
# packages here import this one first. A value of 0 allows the reports.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
