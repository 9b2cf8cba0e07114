"""The endpoint picker of the Gateway API Inference Extension, over Envoy's ext_proc."""
