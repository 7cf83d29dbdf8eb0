CONTRACT_VERSION = 1
FACTS_FILE = "edgespec.json"
GRAPH_FILE, WEIGHTS_FILE = "model.onnx", "weights.bin"
TEXT_FILES = ("config.json","generation_config.json","tokenizer.json","tokenizer_config.json","special_tokens_map.json","chat_template.jinja")
