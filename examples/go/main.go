// Schedule a message and consume it from Go. Usage: go run . [host:port]
// docs/OTHER_LANGUAGES.md says how the stubs in tickwheel/ are made.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	pb "example.com/reminders/tickwheel"
)

func main() {
	address := "127.0.0.1:7700"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	master, err := schedule(ctx, address)
	if err != nil {
		log.Fatal(err)
	}
	if err := consume(ctx, master); err != nil {
		log.Fatal(err)
	}
}

func dial(address string) (*grpc.ClientConn, error) {
	// A master that does not answer is noticed after seconds; TCP alone can take minutes.
	alive := keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}
	plain := grpc.WithTransportCredentials(insecure.NewCredentials())
	return grpc.NewClient(address, plain, grpc.WithKeepaliveParams(alive))
}

// schedule schedules one message, at the master that `address` leads to, and returns the master's connection.
// The request has a producer id and a sequence: a repeat after a lost answer schedules nothing twice.
func schedule(ctx context.Context, address string) (*grpc.ClientConn, error) {
	message := &pb.Message{
		Topic:   "from-go",
		Payload: []byte("hello from Go"),
		When:    &pb.Message_DelayMs{DelayMs: 200},
	}
	producer := fmt.Sprintf("go-%d-%d", os.Getpid(), time.Now().UnixMilli())
	request := &pb.ScheduleRequest{Message: message, ProducerId: producer, Sequence: 1}
	for {
		connection, err := dial(address)
		if err != nil {
			return nil, err
		}
		call, cancel := context.WithTimeout(ctx, 5*time.Second)
		receipt, err := pb.NewSchedulerClient(connection).Schedule(call, request)
		cancel()
		if err == nil {
			id := receipt.Id
			fmt.Printf("scheduled %d-%d-%d\n", id.WheelGroup, id.Hour, id.Index)
			return connection, nil
		}
		connection.Close()
		if code := status.Code(err); ctx.Err() != nil || code != codes.Unavailable && code != codes.DeadlineExceeded {
			return nil, err
		}
		if master := info(err).GetMetadata()["master_address"]; master != "" {
			address = master
		} else {
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// info returns what a node says of an error; nil if the error is not a node's.
func info(err error) *errdetails.ErrorInfo {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}

// consume takes one batch, acknowledges it and returns once the acknowledgement is committed.
func consume(ctx context.Context, master *grpc.ClientConn) error {
	stream, err := pb.NewConsumerClient(master).Consume(ctx)
	if err != nil {
		return err
	}
	open := &pb.OpenConsumer{Group: "go-readers", Topics: []string{"from-go"}, Credits: 10}
	if err := stream.Send(&pb.ConsumeRequest{Content: &pb.ConsumeRequest_Open{Open: open}}); err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		switch content := response.Content.(type) {
		case *pb.ConsumeResponse_Deliver:
			batch := content.Deliver
			for _, payload := range payloads(batch) {
				fmt.Printf("received %s\n", payload)
			}
			settle := &pb.SettleBatch{
				Sequence: 1, Group: batch.Group, Topic: batch.Topic, Outcome: pb.Outcome_ACK,
				Ids: batch.Ids, Attempts: batch.Attempts, Positions: batch.Positions, Epoch: &batch.Epoch,
			}
			if err := stream.Send(&pb.ConsumeRequest{Content: &pb.ConsumeRequest_Settle{Settle: settle}}); err != nil {
				return err
			}
		case *pb.ConsumeResponse_Settled:
			fmt.Printf("settled %d\n", content.Settled.Settled)
			return stream.CloseSend()
		case *pb.ConsumeResponse_Moved:
			return fmt.Errorf("the master is now %s: open the stream there", content.Moved.MasterAddress)
		}
	}
}

// payloads cuts the records of a batch. Columns are packed little-endian arrays; a meta precedes each payload.
func payloads(batch *pb.DeliverBatch) [][]byte {
	var found [][]byte
	var offset uint32
	for row := 0; row < len(batch.Sizes)/4; row++ {
		size := binary.LittleEndian.Uint32(batch.Sizes[4*row:])
		var meta uint32
		if len(batch.MetaSizes) > 0 {
			meta = binary.LittleEndian.Uint32(batch.MetaSizes[4*row:])
		}
		found = append(found, batch.Records[offset+meta:offset+size])
		offset += size
	}
	return found
}
