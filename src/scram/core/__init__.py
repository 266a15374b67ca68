"""Between a public function and an engine: a `Request` is resolved once and run once."""
