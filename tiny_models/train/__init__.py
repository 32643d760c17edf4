"""How the tiny models are made: corpus, tokenizer, documents, rows, training, publishing."""
