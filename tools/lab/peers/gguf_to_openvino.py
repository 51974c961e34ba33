"""`python -m outrider.tools.lab.peers.gguf_to_openvino FILE`: what OpenVINO GenAI makes of a GGUF file, beside it."""

from __future__ import annotations

import sys

import openvino_genai as genai

if __name__ == "__main__":
    genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
