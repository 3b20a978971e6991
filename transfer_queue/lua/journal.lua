-- ARGV: episode, fence, position, packed entry. A repeat of an entry that is already there is a no-op.
local name, fence, position, entry = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
if not owned(name, fence) then return 0 end
if redis.call('LLEN', journal_key(name)) == position then redis.call('RPUSH', journal_key(name), entry) end
redis.call('ZADD', P .. ':leases', now_ms() + metan('lease_ttl_ms'), name)
return 1
