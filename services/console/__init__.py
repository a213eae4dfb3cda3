"""The console: what a recommendation team looks at, as pages of one web application. It talks REST to the other rooms, as any client does."""
