-- needs: run, server, episode
-- ARGV: episode, fence, nonce, packed entry, bytes it counts for, sampled tokens. Values are position and entry: a hash
-- keeps no order.
local episode, fence, nonce, entry, held = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local member = owned(episode, fence, now_ms())
if not member then return lease_lost(episode, fence) end
local journal = key('journal:' .. episode)
if call('HEXISTS', journal, nonce) == 0 then
  call('HSET', journal, nonce, struct.pack('>I4', call('HLEN', journal)) .. entry)
  call('HINCRBY', member.group, 'n' .. member.m, held)
  call('HINCRBY', member.group, 't' .. member.m, ARGV[6])
  add_split_bytes(member.split, held)
end
return 1
