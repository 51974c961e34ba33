# Runs within a bundle, where `argument` is a plan of everything: what is imported late is imported here.
import json
import os
import sys
import tempfile
from importlib import import_module

from outrider import PlanError, PrefixCacheConfig, RequestError, Runtime, plans, plugins, runtime

loaded = Runtime.load(argument, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=512))  # noqa: F821
plain = loaded.generate("import os", max_new_tokens=12, drafter="none", ignore_eos=True).text
for drafter in loaded.manifest.drafters:
    made = loaded.generate("import os", max_new_tokens=12, drafter=drafter.name, ignore_eos=True)
    assert made.text == plain, (drafter.name, made.text, plain)

forms = (
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json_object": True},
    {"regex": "[a-c]{3}"},
    {"choice": ["yes", "no"]},
    {"grammar": 'start: "a" | "b"'},
)
for form in forms:
    loaded.generate("import os", max_new_tokens=40, structured_outputs=form)
try:
    loaded.generate("x", max_new_tokens=4, structured_outputs={"regex": "("})
    raise SystemExit("a wrong expression is taken")
except RequestError:
    pass

chat = {"messages": [{"role": "user", "content": "hello"}], "max_new_tokens": 4}
loaded.generate(**chat)
loaded.generate("x", max_new_tokens=4, temperature=0.7, top_p=0.9, seed=3, logprobs=2, stop=["zz"], bad_words=["q"],
                presence_penalty=0.5, repetition_penalty=1.1, logit_bias={5: 1.0})  # fmt: skip
loaded.beam_search("x", beams=2, max_new_tokens=4)
for mode in ("batching", "in-one-sequence"):
    loaded.generate_branches("import", [" os", " sys"], mode=mode, max_new_tokens=6)
long = list(range(5, 100))
for partial in ("lossless", "lossy"):
    loaded.generate(long, max_new_tokens=6, partial_kv=partial)
handles = [loaded.submit(text, max_new_tokens=6, deadline=60.0) for text in ("import os", "import sys")]
assert [len(handle.result(60).token_ids) for handle in handles] == [6, 6]
file = tempfile.mktemp(dir=os.path.dirname(argument))  # noqa: F821
loaded.save_prefix_cache(file)
loaded.load_prefix_cache(file)
os.unlink(file)
json.dumps(loaded.generate("x", max_new_tokens=2).stats.to_json())
loaded.memory()
loaded.close()
for backend in ("onnxruntime-cuda", "tensorrt", "tensorrt-rtx"):
    try:
        Runtime.load(argument, backend=backend)  # noqa: F821
        raise SystemExit("a plan runs on what it has not")
    except (PlanError, RequestError):
        pass

modules = os.path.dirname(os.path.dirname(runtime.__path__[0]))
for package in (plans, plugins, runtime):
    for folder, _, files in os.walk(package.__path__[0]):
        for file in files:
            name = os.path.relpath(os.path.join(folder, file), modules).partition(".")[0].replace("/", ".")
            if file.endswith(".pyc"):
                import_module(name.removesuffix(".__init__"))
unknown = {name.partition(".")[0] for name in sys.modules} & {"torch", "rich", "onnx", "ssl", "cffi", "unittest"}
assert not unknown, unknown
