"""Training data: documents from files, tokenizers, files of token ids, and batches drawn from them."""
