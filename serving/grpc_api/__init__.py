"""The gRPC API: `shardrank.v1.RankingService`, health checking and server reflection, on HTTP/2 of our own."""
