-- needs: run, episode
-- ARGV: episode, fence, nonce, packed entry. Values are position and entry: a hash keeps no order.
local episode, fence, nonce, entry = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local member = owned(episode, fence, now_ms())
if not member then return lease_lost(episode, fence) end
local journal = key('journal:' .. episode)
if call('HEXISTS', journal, nonce) == 0 then
  call('HSET', journal, nonce, struct.pack('>I4', call('HLEN', journal)) .. entry)
  call('HINCRBY', member.group, 'n' .. member.m, #entry)
  add_bytes(member.lane, #entry)
end
return 1
