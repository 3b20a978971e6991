-- ARGV: version, packed manifest.
if tonumber(ARGV[1]) ~= metan('version') then return 0 end
redis.call('HSET', META, 'manifest', ARGV[2])
return 1
