"""The KV hand-over: prefill offers slots of its arena, decode pulls them."""
