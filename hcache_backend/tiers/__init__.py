"""L3 as SGLang calls it: our store, and a tier that machines share."""
