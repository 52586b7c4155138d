"""``--device browser``: a page that runs ONNX bundles with onnxruntime-web and sends figures back."""
