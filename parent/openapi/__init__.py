"""The OpenAPI document: `table` has every route, `document` makes the document of it."""
